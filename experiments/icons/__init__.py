"""Icons of open sets with their names, as pictures of 32 x 32 pixels."""
