"""An interpreter of PTX for machines without a device."""
