"""The commands of `jaxpruner …`, one file each."""
