"""Files: records that are read without trust."""
