"""Run files to begin with: the recipes that come with the package, and one of them made to fit the user's data."""
