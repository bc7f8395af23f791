"""Byte-level data from text files, and the book that ships with the package."""
