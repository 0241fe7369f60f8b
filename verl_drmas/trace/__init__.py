"""What a team said in a step, as a page: sessions as conversations, with rewards and advantages."""
