"""Ties: names that share memory, and the geometry of each; found, recorded, checked, edited."""
