"""All use of private parts of Keras and PyTorch, each with its reason.

No other room imports `keras.src`, uses an attribute of theirs whose name begins with an
underscore, or replaces a function that Keras has compiled. A file has a subject, and
imports nothing of the library but other files of this room.
"""
