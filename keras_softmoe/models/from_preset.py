"""Loading and saving presets: our names, our errors, nothing half-written."""

from keras_softmoe import presets


class PresetMixin:
    """`from_preset` by a name of this library, `save_to_preset` all or nothing.

    Comes before the KerasHub class in the list of bases; KerasHub does the work.
    """

    @classmethod
    def from_preset(cls, preset, load_weights=True, **kwargs):
        """Load a model from a preset.

        Args:
            preset: str: a name from `keras_softmoe.presets.names()`, the path of a
                preset directory, or a KerasHub handle (`"hf://user/model"`).
            load_weights: bool, whether to load weights or start from random ones.
            **kwargs: what to change in the saved configuration. For backbones any
                argument of the class; for tasks `num_classes` (a new head),
                `image_shape` and `dtype`. With another `image_shape` the position
                embeddings are resampled.

        Returns:
            an instance of the class.

        Raises:
            ValueError: if the name is unknown (the message offers the nearest), the
                preset has no weights, or a file is missing, damaged or foreign.

        Example:

        >>> name = "soft_moe_small_patch16_128e_224"
        >>> backbone = ksm.models.ViTMoEBackbone.from_preset(name, load_weights=False)
        """
        directory = presets.resolve(preset, load_weights)
        with presets.explained(directory):
            return super().from_preset(directory, load_weights=load_weights, **kwargs)

    def save_to_preset(self, preset_dir, **kwargs):
        """Save as a preset directory. If that fails, an existing one stays intact.

        Args:
            preset_dir: str, the directory.
            **kwargs: as in KerasHub (`max_shard_size`, in GB).
        """
        with presets.replaced_directory(preset_dir) as directory:
            super().save_to_preset(directory, **kwargs)
