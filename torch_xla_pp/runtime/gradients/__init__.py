"""The gradients of a step: sums, other replicas, copies of parameters, the norm."""
