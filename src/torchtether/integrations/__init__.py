"""Other libraries, one file each: imported on demand, none when torchtether is imported."""
