"""Replicas in other processes, and the engines that start them."""
