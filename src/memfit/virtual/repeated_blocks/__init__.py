"""Deep models at the price of shallow ones: repeated blocks are traced once and unrolled."""
