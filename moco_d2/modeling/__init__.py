"""MoCo and its parts as detectron2 modules."""
