"""What a trainer decides for itself: each save, its slots, its promises, and which bytes it takes from whom."""
