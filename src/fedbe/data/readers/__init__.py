"""Readers of file formats: archives, CIFAR, IDX (MNIST), Tiny-ImageNet, image files. No reader unpickles."""
