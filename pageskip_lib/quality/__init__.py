"""Does the model still work: policies, and the needle."""
