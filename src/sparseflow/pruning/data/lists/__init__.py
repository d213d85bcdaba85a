"""Formats of labeled videos: class folders, lists, and the files of public datasets."""
