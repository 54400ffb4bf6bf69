"""The router study: many routers in one model, on the same images, with seeds."""

from keras_softmoe.study.claims import Claim as Claim
from keras_softmoe.study.claims import Difference as Difference
from keras_softmoe.study.claims import claims as claims
from keras_softmoe.study.configurations import Configuration as Configuration
from keras_softmoe.study.configurations import configurations as configurations
from keras_softmoe.study.figures import plot_study as plot_study
from keras_softmoe.study.runner import gather as gather
from keras_softmoe.study.runner import run_study as run_study
from keras_softmoe.study.scales import FULL as FULL
from keras_softmoe.study.scales import SMALL as SMALL
from keras_softmoe.study.scales import SMOKE as SMOKE
from keras_softmoe.study.scales import Scale as Scale
from keras_softmoe.study.tables import claims_table as claims_table
from keras_softmoe.study.tables import report as report
from keras_softmoe.study.tables import table as table
