"""What recipes share: the runs of a study, how each is started, and single agents on verl's own trainer."""
