"""What tests share: twins in plain NumPy, small models, servers, programs."""
