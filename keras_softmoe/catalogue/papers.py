"""Tables of the papers: the data of the catalogue."""

# By the papers' letters: word, width, blocks, heads, hidden width of an MLP
SIZES = {
    "S": ("small", 384, 12, 6, 1536),
    "B": ("base", 768, 12, 12, 3072),
    "L": ("large", 1024, 24, 16, 4096),
    "H": ("huge", 1280, 32, 16, 5120),
}
VMOE_SIZES = {
    **SIZES,
    "S": ("small", 512, 8, 8, 2048),
    "15B": ("15b", 1408, 48, 16, 6400),
}

# V-MoE table 8: row, model, placement of 32 experts, K, parameters with a head. The
# patch of 15B is not in the paper: it is that of the ViT it is based on (Zhai et al.
# 2022, table 2), and divides the 560 pixels of its fine-tuning.
VMOE_CLASSES = 18_291
VMOE = [
    ("ViT-S/32", "S/32", None, None, "36.5M"),
    ("V-MoE-S/32, Last 2", "S/32", "last2", 1, "166.7M"),
    ("V-MoE-S/32, Last 2", "S/32", "last2", 2, "166.7M"),
    ("V-MoE-S/32, Every 2", "S/32", "every2", 2, "296.9M"),
    ("V-MoE-S/32, Last 2", "S/32", "last2", 5, "166.7M"),
    ("ViT-B/32", "B/32", None, None, "102.1M"),
    ("V-MoE-B/32, Last 2", "B/32", "last2", 1, "395.0M"),
    ("V-MoE-B/32, Last 2", "B/32", "last2", 2, "395.0M"),
    ("V-MoE-B/32, Every 2", "B/32", "every2", 2, "980.6M"),
    ("V-MoE-B/32, Last 2", "B/32", "last2", 5, "395.0M"),
    ("ViT-L/32", "L/32", None, None, "325.3M"),
    ("V-MoE-L/32, Last 2", "L/32", "last2", 2, "845.8M"),
    ("ViT-B/16", "B/16", None, None, "100.5M"),
    ("V-MoE-B/16, Last 2", "B/16", "last2", 1, "393.3M"),
    ("V-MoE-B/16, Last 2", "B/16", "last2", 2, "393.3M"),
    ("V-MoE-L/32, Every 2", "L/32", "every2", 2, "3448.2M"),
    ("V-MoE-B/16, Every 2", "B/16", "every2", 2, "979.0M"),
    ("ViT-L/16", "L/16", None, None, "323.1M"),
    ("V-MoE-L/16, Last 2", "L/16", "last2", 1, "843.6M"),
    ("V-MoE-L/16, Last 2", "L/16", "last2", 2, "843.6M"),
    ("V-MoE-L/16, Every 2", "L/16", "every2", 2, "3446.0M"),
    ("ViT-H/14", "H/14", None, None, "655.8M"),
    ("V-MoE-H/14, Last 5", "H/14", "last5", 2, "2688.6M"),
    ("V-MoE-H/14, Every 2", "H/14", "every2", 2, "7160.8M"),
    ("V-MoE-15B", "15B/14", "every2", 2, "14705.1M"),
]
# The released checkpoints have 8 experts.
VMOE_RELEASED = ("S/32", "B/16")

# Soft MoE tables 9 and 10: by model, the experts (0: dense), parameters with a head
# and GFLOP per image (table 9), row of table 10.
SOFT_CLASSES = 29_593
SOFT = {
    "S/32": [(0, None, None, 1), (32, None, None, 3), (64, None, None, 7)],
    "S/16": [
        (0, "33M", 9.2, 20),
        (16, None, None, 18),
        (32, None, None, 19),
        (64, None, None, 21),
        (128, "933M", 8.6, 22),
        (256, None, None, 36),
    ],
    "S/14": [(0, None, None, None), (256, "1.8B", 13.2, None)],
    "S/8": [(0, None, None, 80), (512, None, None, 81)],
    "B/32": [(0, None, None, 14), (32, None, None, 15), (64, None, None, 32)],
    "B/16": [
        (0, "108M", 35.1, 51),
        (128, "3.7B", 32.0, 52),
        (256, None, None, 63),
        (512, None, None, 78),
    ],
    "L/32": [(0, None, None, 56), (32, None, None, 59), (64, None, None, 71)],
    "L/16": [(0, "333M", 122.9, 85), (128, "13.1B", 111.1, 87), (256, None, None, 95)],
    "H/14": [
        (0, "669M", 334.2, 102),
        (128, "27.3B", 284.6, 101),
        (256, "54.1B", 342.4, None),
    ],
}

# Baselines of table 10, by model and experts, by row: images per group, capacity factor
EXPERT_CHOICE = {
    ("S/32", 32): {5: (8, 1.0), 2: (8, 0.5), 4: (1, 0.5), 9: (1, 1.0)},
    ("S/32", 64): {6: (8, 1.0), 8: (1, 1.0)},
    ("S/16", 32): {35: (8, 1.0), 26: (1, 1.0), 39: (1, 2.0), 44: (8, 2.0)},
    ("S/16", 128): {27: (8, 0.5), 25: (1, 0.5)},
    ("S/16", 256): {43: (8, 1.0), 38: (1, 1.0)},
    ("S/8", 32): {93: (8, 1.0), 82: (1, 1.0)},
    ("S/8", 512): {99: (8, 1.0), 94: (1, 1.0)},
    ("B/32", 32): {28: (8, 1.0), 23: (8, 0.5), 24: (1, 0.5), 34: (1, 1.0)},
    ("B/32", 64): {29: (8, 1.0), 33: (1, 1.0)},
    ("B/16", 32): {60: (8, 1.0), 54: (1, 1.0), 73: (1, 2.0), 75: (8, 2.0)},
    ("B/16", 128): {53: (8, 0.5), 55: (1, 0.5)},
    ("B/16", 256): {66: (8, 1.0), 62: (1, 1.0)},
    ("L/32", 32): {67: (8, 1.0), 57: (8, 0.5), 58: (1, 0.5), 72: (1, 1.0)},
    ("L/32", 64): {65: (8, 1.0), 70: (1, 1.0)},
    ("L/16", 32): {90: (1, 1.0), 98: (1, 2.0)},
    ("L/16", 128): {86: (1, 0.5)},
    ("L/16", 256): {97: (1, 1.0)},
    ("H/14", 64): {103: (8, 1.25)},
}
# K, capacity factor, in groups of 8 images
TOKEN_CHOICE = {
    ("S/32", 32): {10: (1, 1.0), 12: (2, 1.0), 17: (2, 2.0)},
    ("S/32", 64): {11: (1, 1.0), 13: (2, 1.0), 16: (2, 2.0)},
    ("S/16", 32): {37: (1, 1.0), 45: (2, 1.0), 49: (2, 2.0)},
    ("S/16", 64): {42: (1, 1.0), 48: (2, 1.0), 50: (2, 2.0)},
    ("S/8", 32): {96: (1, 1.0), 100: (2, 1.0), 107: (2, 2.0)},
    ("B/32", 32): {30: (1, 1.0), 40: (2, 1.0), 47: (2, 2.0)},
    ("B/32", 64): {31: (1, 1.0), 41: (2, 1.0), 46: (2, 2.0)},
    ("B/16", 32): {61: (1, 1.0), 77: (2, 1.0), 88: (2, 2.0)},
    ("B/16", 64): {64: (1, 1.0), 79: (2, 1.0), 89: (2, 2.0)},
    ("L/32", 32): {69: (1, 1.0), 74: (2, 1.0), 84: (2, 2.0)},
    ("L/32", 64): {68: (1, 1.0), 76: (2, 1.0), 83: (2, 2.0)},
    ("L/16", 32): {91: (1, 1.0), 104: (2, 2.0)},
    ("L/16", 64): {92: (1, 1.0), 105: (2, 2.0)},
    ("H/14", 64): {106: (1, 1.25)},
}

# Router study, section 3.1: 32 experts in every second block, K or capacity 1 and 2.
STUDY = ("B/32", "B/16", "L/16")

# LIMoE tables 4 and 5: by model, accuracy on ImageNet (zero-shot, 10-shot) and recall@1
# on COCO (image of a caption, caption of an image), of the dense one-tower model and of
# LIMoE; soft minimum of experts (table 5's thresholds are their logarithms) for text
# and images. H/14 has no dense twin in the paper.
LIMOE = {
    "S/32": ((44.4, 33.8, 18.2, 30.4), (57.9, 48.1, 25.0, 38.9), (12, 17)),
    "S/16": ((50.3, 40.4, 22.7, 35.8), (64.5, 56.3, 29.2, 43.7), (9, 20)),
    "B/32": ((58.8, 48.7, 27.4, 42.5), (67.5, 60.4, 31.0, 45.7), (12, 17)),
    "B/16": ((64.3, 55.3, 31.7, 46.8), (73.7, 68.2, 36.2, 51.3), (9, 20)),
    "L/32": ((68.1, 60.7, 34.6, 51.2), (74.6, 69.7, 37.2, 54.5), (20, 1)),
    "L/16": ((73.5, 67.6, 38.3, 54.3), (78.6, 74.7, 39.6, 55.7), (28, 8)),
    "H/14": (None, (84.1, 81.4, 39.8, 51.1), (4, 25)),
}
# Appendix A.3, where blocks are counted from 1: 32 is among them, of 32 blocks. The
# figures of appendix G count from 0: their layers 6, 14 and 31 are 7, 15, 32.
LIMOE_H14_BLOCKS = (3, 7, 11, 15, 18, 21, 24, 26, 28, 30, 31, 32)
