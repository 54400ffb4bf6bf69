"""What the experiments share: trainings, comparisons, cards and weights of presets."""
