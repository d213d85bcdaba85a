"""Decoding of one video: video files, directories of images, tar members, seeking, and conversion to RGB."""
