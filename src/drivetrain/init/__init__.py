"""Run files to begin with: the recipes that come with the package, and one of them fitted to the user's data."""
