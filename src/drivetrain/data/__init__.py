"""Sources, formats and the order of samples."""
