"""Figures of what the routers do. They need matplotlib (the extra `viz`).

Every function returns a `matplotlib.figure.Figure`: a notebook shows it, and
`figure.savefig("routing.png")` keeps it.
"""

from keras_softmoe.visualization.routing import plot_experts as plot_experts
from keras_softmoe.visualization.routing import plot_slots as plot_slots
from keras_softmoe.visualization.specialization import (
    plot_experts_by_class as plot_experts_by_class,
)
from keras_softmoe.visualization.specialization import (
    plot_experts_by_position as plot_experts_by_position,
)
from keras_softmoe.visualization.statistics import (
    plot_choice_weights as plot_choice_weights,
)
from keras_softmoe.visualization.statistics import (
    plot_dropped_tokens as plot_dropped_tokens,
)
from keras_softmoe.visualization.statistics import (
    plot_experts_per_image as plot_experts_per_image,
)
from keras_softmoe.visualization.sweeps import (
    plot_discarded_patches as plot_discarded_patches,
)
from keras_softmoe.visualization.sweeps import (
    plot_random_routers as plot_random_routers,
)
from keras_softmoe.visualization.sweeps import plot_sweep as plot_sweep
