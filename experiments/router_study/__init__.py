"""The router study: many routers in one model, on the same images, with seeds."""

from experiments.lib.comparisons import Claim as Claim, Difference as Difference
from experiments.router_study.claims import claims as claims
from experiments.router_study.configurations import (
    Configuration as Configuration,
    configurations as configurations,
)
from experiments.router_study.figures import (
    plot_curves as plot_curves,
    plot_study as plot_study,
)
from experiments.router_study.runner import gather as gather, run_study as run_study
from experiments.router_study.scales import (
    ANYWHERE as ANYWHERE,
    FULL as FULL,
    SMALL as SMALL,
    SMOKE as SMOKE,
    Scale as Scale,
)
from experiments.router_study.tables import (
    claims_table as claims_table,
    report as report,
    table as table,
)
from experiments.router_study.transfer import (
    plot_transfer as plot_transfer,
    transfer as transfer,
)
