"""What every room uses: checks of arguments, files, labels, and the build that is installed."""
