"""Tools of the repository: measuring, checking, comparing. Not installed with the package."""
