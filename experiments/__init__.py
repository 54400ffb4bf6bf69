"""Programs of this repository, which train through the library's public names."""
