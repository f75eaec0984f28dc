"""Files in memory and under locks: segments and who fills them, mappings, external files."""
