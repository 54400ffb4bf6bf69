"""LIMoE's router: one choice of experts for the tokens of images and text."""

from collections.abc import Sequence
from typing import Unpack

import keras

from keras_softmoe.checks import check_numbers
from keras_softmoe.routers._losses import classic_losses, entropy_losses
from keras_softmoe.routers._modalities import Modalities, ModalityTokenChoice
from keras_softmoe.routers._policies import Softmax
from keras_softmoe.routers._router import check_num_experts
from keras_softmoe.routers._sparse import SparseRouter
from keras_softmoe.routers.settings import SparseSettings


class LIMoESettings(SparseSettings, total=False):
    """Those of all sparse routers, and the capacity, as `LIMoERouter` describes it."""

    capacity_factor: float | None


@keras.saving.register_keras_serializable(package="keras_softmoe")
class LIMoERouter(SparseRouter):
    """Tokens of images and text choose among the same experts.

    A token chooses its most probable experts, as in V-MoE. What is new are losses that
    know the modality of a token: without them text, of which there is less, ended up
    with one expert or none in the paper.

    Args:
        num_experts: int, number of experts.
        num_selected_experts: int, the number `K` of experts that a token chooses.
        priority: the order in which tokens are assigned: `"sum"` (batch prioritized
            routing, by the sum of a token's `K` largest probabilities; for `K = 1` the
            same as `"max"`), `"max"`, `"position"`, `"pair"` or `"random"` as in
            `ops.token_choice`; `"image_first"` or `"text_first"`, one modality before
            the other and by position among themselves.
        loss_weight: float, weight of the average of the losses.
        per_modality: bool, whether images and text have a router of their own over the
            shared experts.
        image_experts: int, how many experts images may use, from the first on. All if
            `None`.
        text_experts: int, how many experts text may use, up to the last. All if
            `None`. Experts are disjoint if the two add up to `num_experts`.
        single_modality_capacity_factor: float, slots per choice where there are only
            images or only text, which do not use all experts.
        noise_std: float. In training, normal noise of standard deviation
            `noise_std / num_experts` is added to the logits that choose and weigh.
            The load loss is about it: with 0 give `losses` without one.
        kept_experts: `None`, or of a pruned router the experts that are left: a
            sequence of `num_experts` ints, ascending, under `num_predicted_experts`.
            Probabilities are still distributed among all experts that the model was
            trained with, and tokens choose among those that are left, by the
            probabilities that these have. So gates are as large as in training
            ("router-pred", appendix E.4). Not trained, it takes `losses=()`.
        num_predicted_experts: int, how many experts there were before. `None` for
            `num_experts`.
        **settings: `capacity_factor`, by default 1.05 slots per choice while images and
            text are routed together, as in `SoftmaxTokenChoiceRouter`; and those of all
            sparse routers, see `SparseSettings`. By default `losses` are
            `classic_losses() + entropy_losses(num_experts)`.

    Weights: `kernel` `(D, E)`, or `image_kernel` and `text_kernel` if `per_modality`.

    Call arguments:
        - `tokens`: `(G, S, D)` float tensor.
        - `valid`: optional `(G, S)` bool tensor, `False` for padding.
        - `modalities`: pairs of a modality's name and the number of its tokens, in the
          order in which they follow each other, again and again, in a group.
          `layers.MoE` passes them when it is called on a dict.

    Returns:
        `Decision` with a `SlotRouting`. In training, the mean of `auxiliary_loss` over
        the groups is added to the losses. It averages those of `losses` whose modality
        is there; entropies and importance are those of the probabilities without noise.

    Raises:
        ValueError: if a threshold is over `log(num_experts)`, the experts of the
            modalities leave some out, a token would choose more experts than its
            modality has, the modalities are not known, the kept experts are not
            `num_experts` different ones of those that there were, or another argument
            is not among the accepted values.

    Source: LIMoE, section 2 and appendices B (losses), C (priorities), D.1 (capacity
    for one modality) and E.1 to E.4 (`K > 1`, number of experts, kinds of routers,
    pruning).

    Examples:
        >>> router = ksm.routers.LIMoERouter(num_experts=8)
        >>> tokens = np.random.normal(size=(2, 24, 32))
        >>> decision = router(tokens, modalities=(("image", 16), ("text", 8)))
        >>> decision.routing.token.shape
        (2, 8, 3)
    """

    knows_modalities = True

    def __init__(
        self,
        num_experts: int,
        num_selected_experts: int = 1,
        *,
        priority: str = "sum",
        loss_weight: float = 0.04,
        per_modality: bool = False,
        image_experts: int | None = None,
        text_experts: int | None = None,
        single_modality_capacity_factor: float = 16.0,
        noise_std: float = 1.0,
        kept_experts: Sequence[int] | None = None,
        num_predicted_experts: int | None = None,
        **settings: Unpack[LIMoESettings],
    ):
        check_num_experts(num_experts)
        check_numbers(loss_weight=loss_weight)
        assignment = ModalityTokenChoice(num_selected_experts, priority)
        modalities = Modalities(
            per_modality=per_modality,
            image_experts=image_experts,
            text_experts=text_experts,
            single_modality_capacity_factor=single_modality_capacity_factor,
            kept_experts=kept_experts,
            num_predicted_experts=num_predicted_experts,
        )
        if settings.get("losses") is None:
            # With the load loss also where there is no noise: that is an error.
            settings["losses"] = classic_losses() + entropy_losses(
                num_predicted_experts or num_experts,
                num_selected_experts=num_selected_experts,
            )
        super().__init__(
            num_experts,
            Softmax(noise_std),
            assignment,
            modalities,
            loss_weight=loss_weight,
            **settings,
        )


class PrunedLIMoERouter:
    """Another name of a `LIMoERouter` with `kept_experts`, which saved files may have.

    Its constructor returns a `LIMoERouter`, by default without losses.
    """

    def __new__(
        cls, num_experts, kept_experts, num_predicted_experts, losses=(), **kwargs
    ):
        return LIMoERouter(
            num_experts,
            kept_experts=kept_experts,
            num_predicted_experts=num_predicted_experts,
            losses=losses,
            **kwargs,
        )

    @classmethod
    def from_config(cls, config):
        return cls(**config)


keras.saving.get_custom_objects()["keras_softmoe>PrunedLIMoERouter"] = PrunedLIMoERouter
