"""Readers of data that stay on disk: images, texts and clients, each by the format of its files.

A reader is a sequence whose items are read when they are asked for; `pipelines` makes feeds of
readers with grain. All need the extra `readers`.
"""
