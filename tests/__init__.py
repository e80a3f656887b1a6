"""The tests, by kind, and what they share."""
