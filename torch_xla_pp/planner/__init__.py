"""Find out how to cut a model into stages, and how to run them."""
