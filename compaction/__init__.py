"""What stays in the window, what leaves it, where it goes, and how it is found again."""
