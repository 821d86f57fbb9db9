"""The laws of a schedule, and the faults that break them."""
