"""Tools: what the model may call, what contains them, and who is asked."""
