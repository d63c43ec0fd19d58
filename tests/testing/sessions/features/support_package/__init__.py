"""A package next to the tests."""
