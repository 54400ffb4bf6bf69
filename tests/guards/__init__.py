"""What a change of the structure must not change: recorded numbers, planted faults."""
