"""Shared by all rooms: checks of arguments, errors, files, labels, and the installed build."""
