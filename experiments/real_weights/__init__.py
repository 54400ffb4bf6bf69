"""What upcycling is worth from weights that were really pretrained, DINOv2 ViT-S/14."""
