"""The laws that a schedule keeps, and what breaks them."""
