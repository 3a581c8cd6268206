"""Where elements lie: views over memory, blocks of bytes, groups of what overlaps. Nothing is read."""
