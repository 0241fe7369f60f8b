"""The database that two decoupled jobs meet in."""
