"""Names of classes as the fonts of a figure can draw them."""

from keras_softmoe import drawing


def drawable_names(class_names, num_classes):
    """A name for each class, or its number where there is none that can be drawn.

    Args:
        class_names: sequence of str, or `None` for numbers alone.
        num_classes: int.

    Returns:
        sequence of str and int.

    Raises:
        ValueError: if there are fewer names than classes.
    """
    if class_names is None:
        return range(num_classes)
    if len(class_names) < num_classes:
        raise ValueError(
            f"`class_names` must have a name for each of the {num_classes} classes. "
            f"Received: {len(class_names)} names."
        )
    characters = _characters_of_fonts()
    return [
        name if characters.issuperset(map(ord, name)) else index
        for index, name in enumerate(map(str, class_names))
    ]


def _characters_of_fonts():
    """Set of the code points that the fonts of matplotlib's settings can draw."""
    manager = drawing.import_matplotlib().font_manager
    families = manager.FontProperties().get_family()
    properties = [manager.FontProperties(family=[family]) for family in families]
    paths = map(manager.findfont, properties)
    return {code for path in paths for code in manager.get_font(path).get_charmap()}
