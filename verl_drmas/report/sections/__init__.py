"""The sections of a report, each made of blocks."""
