"""Figures of what the routers do. They need matplotlib (the extra `viz`).

Every function returns a `matplotlib.figure.Figure`: a notebook shows it, and
`figure.savefig("routing.png")` keeps it.
"""

from keras_softmoe.visualization.routing import plot_experts as plot_experts
from keras_softmoe.visualization.routing import plot_slots as plot_slots
