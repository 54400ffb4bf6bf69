"""What upcycling is worth: a trained dense model goes on, as it is or as a mixture."""
