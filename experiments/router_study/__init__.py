"""The router study: many routers in one model, on the same images, with seeds."""

from experiments.lib.comparisons import Claim as Claim
from experiments.lib.comparisons import Difference as Difference
from experiments.router_study.claims import claims as claims
from experiments.router_study.configurations import Configuration as Configuration
from experiments.router_study.configurations import configurations as configurations
from experiments.router_study.figures import plot_curves as plot_curves
from experiments.router_study.figures import plot_study as plot_study
from experiments.router_study.runner import gather as gather
from experiments.router_study.runner import run_study as run_study
from experiments.router_study.scales import ANYWHERE as ANYWHERE
from experiments.router_study.scales import FULL as FULL
from experiments.router_study.scales import SMALL as SMALL
from experiments.router_study.scales import SMOKE as SMOKE
from experiments.router_study.scales import Scale as Scale
from experiments.router_study.tables import claims_table as claims_table
from experiments.router_study.tables import report as report
from experiments.router_study.tables import table as table
from experiments.router_study.transfer import plot_transfer as plot_transfer
from experiments.router_study.transfer import transfer as transfer
