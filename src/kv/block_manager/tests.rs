use super::*;
use crate::kv::Origin;

const SIZE: usize = 4;

/// A sequence: a block table and its number of tokens.
struct Owner {
    table: BlockTable,
    len: usize,
}

struct Pool {
    manager: BlockManager,
    copies: Vec<BlockCopy>,
}

impl Pool {
    fn new(blocks: usize, keep_prefixes: bool) -> Pool {
        Pool::windowed(blocks, keep_prefixes, &[None])
    }

    fn windowed(blocks: usize, keep_prefixes: bool, windows: &[Option<usize>]) -> Pool {
        let manager = BlockManager::new(blocks, Paging::new(SIZE, windows), keep_prefixes).unwrap().with_host(8).unwrap();
        Pool { manager, copies: Vec::new() }
    }

    fn owner(&mut self, len: usize) -> Owner {
        let mut owner = Owner { table: BlockTable::default(), len: 0 };
        self.write(&mut owner, len).unwrap();
        owner
    }

    /// Writes `n` more tokens and returns the copies.
    fn write(&mut self, owner: &mut Owner, n: usize) -> std::result::Result<Vec<BlockCopy>, NoSpace> {
        self.manager.prepare(&mut owner.table, owner.len..owner.len + n, &mut self.copies)?;
        let copies = std::mem::take(&mut self.copies);
        self.manager.release_copied(&copies);
        self.manager.fill(&owner.table, owner.len..owner.len + n);
        owner.len += n;
        Ok(copies)
    }

    fn fork(&mut self, owner: &Owner, len: usize) -> Owner {
        let mut table = BlockTable::default();
        self.manager.fork(&owner.table, len, &mut table);
        Owner { table, len }
    }

    /// Swaps a table out and returns the number of copied blocks.
    fn swap_out(&mut self, owner: &mut Owner) -> usize {
        self.manager.swap_out(&mut owner.table).unwrap();
        let moves = self.manager.moves().out.len();
        self.manager.clear_moves();
        moves
    }

    fn swap_in(&mut self, owner: &mut Owner) -> usize {
        self.manager.swap_in(&mut owner.table).unwrap();
        assert!(self.manager.continue_swap_in(&mut owner.table));
        let moves = self.manager.moves().back.len();
        self.manager.clear_moves();
        moves
    }

    fn refs(&self, owner: &Owner) -> Vec<u32> {
        owner.table.blocks().iter().map(|&block| self.manager.block_pool.refs(block)).collect()
    }

    fn check(&self, owners: &[&Owner]) {
        self.manager.check(owners.iter().map(|owner| &owner.table), &[]);
    }
}

fn computed(hashes: &[BlockHash]) -> HashedTokens<'_> {
    HashedTokens { root: BlockHash::default(), hashes, tokens: &[], origin: Origin::Computed }
}

#[test]
fn a_table_grows_by_whole_blocks_when_tokens_need_them() {
    let mut manager = BlockManager::new(4, Paging::without_windows(16), false).unwrap();
    let mut table = BlockTable::default();
    for (tokens, blocks) in [(1, 1), (16, 1), (17, 2), (33, 3), (20, 3)] {
        manager.prepare(&mut table, 0..tokens, &mut Vec::new()).unwrap();
        assert_eq!(table.blocks().len(), blocks);
    }
    manager.check([&table].into_iter(), &[]);
}

#[test]
fn a_failed_allocation_changes_nothing() {
    let mut pool = Pool::new(3, false);
    let mut owner = pool.owner(SIZE);
    assert_eq!(pool.write(&mut owner, 3 * SIZE), Err(NoSpace));
    assert_eq!((owner.table.blocks().len(), pool.manager.free_blocks()), (1, 2));
    pool.manager.free(&mut owner.table);
    assert_eq!((pool.manager.free_blocks(), pool.manager.filled_slots()), (3, 0));
    pool.check(&[]);
}

#[test]
fn slots_follow_the_table() {
    let mut pool = Pool::new(8, false);
    let (mut a, b) = (pool.owner(4), pool.owner(4));
    pool.write(&mut a, 1).unwrap();
    let slot = |owner: &Owner, position| pool.manager.slots(&owner.table, position).next().unwrap();
    assert_eq!([slot(&a, 3), slot(&b, 0), slot(&a, 4)], [3, 4, 8]);
}

/// Figure 8 of the PagedAttention paper: two samples of a prompt of seven tokens, blocks of four.
#[test]
fn figure_8_samples_share_a_prompt_and_the_first_write_copies_the_last_block() {
    let mut pool = Pool::new(8, false);
    let mut a1 = pool.owner(7);
    let mut a2 = pool.fork(&a1, 7);
    assert_eq!(a1.table.blocks(), a2.table.blocks());
    assert_eq!(pool.refs(&a1), [2, 2]);
    assert_eq!((pool.manager.used_blocks(), pool.manager.filled_slots()), (2, 7));

    // A1 writes first: its logical block 1 is copied, and the old block has one owner left.
    let shared = a1.table.blocks()[1];
    assert_eq!(pool.write(&mut a1, 1).unwrap(), [BlockCopy { from: shared, to: a1.table.blocks()[1] }]);
    assert_eq!((pool.refs(&a1), pool.refs(&a2)), (vec![2, 1], vec![2, 1]));
    // A2 then writes in place.
    assert_eq!(pool.write(&mut a2, 1).unwrap(), []);
    assert_eq!(a2.table.blocks()[1], shared);
    assert_eq!((pool.manager.used_blocks(), pool.manager.filled_slots()), (3, 4 + 4 + 4));
    pool.check(&[&a1, &a2]);
}

/// Within one step, the reference of a planned copy does not make the second writer copy too.
#[test]
fn only_the_first_of_two_writes_in_a_step_copies_the_block() {
    let mut pool = Pool::new(8, false);
    let mut a1 = pool.owner(7);
    let mut a2 = pool.fork(&a1, 7);
    let Pool { manager, copies } = &mut pool;
    manager.prepare(&mut a1.table, 7..8, copies).unwrap();
    manager.prepare(&mut a2.table, 7..8, copies).unwrap();
    assert_eq!(copies.len(), 1);
    // The step fails: the previous state is restored.
    let copy = copies.pop().unwrap();
    assert!(manager.undo(copy, &mut a1.table));
    assert_eq!((pool.refs(&a1), pool.manager.used_blocks()), (vec![2, 2], 2));
    pool.check(&[&a1, &a2]);
}

/// Figure 9: beam search with k = 4. Beams share blocks. Candidates 0 and 3 are dropped, and the
/// next ones come from 1 and 2.
#[test]
fn figure_9_dropped_beams_free_the_blocks_that_only_they_used() {
    let mut pool = Pool::new(32, false);
    // As in the figure: block 0 belongs to all four, block 1 to 0, 1 and 2, block 2 to 3, and so
    // on.
    let mut root = pool.owner(SIZE);
    let mut left = pool.fork(&root, SIZE);
    pool.write(&mut left, SIZE).unwrap();
    let mut beam3 = pool.fork(&root, SIZE);
    pool.write(&mut beam3, SIZE).unwrap();
    let (mut beam0, mut beam1) = (pool.fork(&left, 2 * SIZE), pool.fork(&left, 2 * SIZE));
    pool.write(&mut beam0, SIZE).unwrap();
    pool.write(&mut beam1, SIZE).unwrap();
    let mut beam2 = pool.fork(&beam1, 3 * SIZE);
    pool.write(&mut beam0, SIZE - 1).unwrap();
    pool.write(&mut beam1, SIZE - 1).unwrap();
    pool.write(&mut beam2, SIZE - 1).unwrap();
    pool.write(&mut beam3, 2 * SIZE - 1).unwrap();
    [&mut root, &mut left].into_iter().for_each(|owner| pool.manager.free(&mut owner.table));
    assert_eq!(pool.refs(&beam1), [4, 3, 2, 1]);
    assert_eq!(pool.refs(&beam3), [4, 1, 1, 1]);
    assert_eq!(pool.manager.used_blocks(), 1 + 1 + 2 + 3 + 3);
    pool.check(&[&beam0, &beam1, &beam2, &beam3]);

    // The four best next candidates: two from beam 1, two from beam 2.
    let next1 = pool.fork(&beam1, beam1.len);
    let next2 = pool.fork(&beam2, beam2.len);
    let before = pool.manager.used_blocks();
    [&mut beam0, &mut beam3].into_iter().for_each(|owner| pool.manager.free(&mut owner.table));
    // Beam 0 has two blocks of its own, beam 3 has three.
    assert_eq!(before - pool.manager.used_blocks(), 5);
    assert_eq!(pool.refs(&beam1), [4, 4, 4, 2]);
    // Each pair writes: one copy per pair, and no other block is changed.
    let mut beams = [beam1, next1, beam2, next2];
    let copies: usize = beams.iter_mut().map(|beam| pool.write(beam, 1).unwrap().len()).sum();
    assert_eq!(copies, 2);
    pool.check(&beams.iter().collect::<Vec<_>>());
}

#[test]
fn a_prefix_is_found_after_its_sequence_has_been_freed() {
    let mut pool = Pool::new(8, true);
    let root = BlockHash::root(&[0; 32], b"");
    let hashes = [root.next(&[1]), root.next(&[1]).next(&[2])];
    let mut owner = pool.owner(2 * SIZE + 1);
    (0..hashes.len()).for_each(|place| pool.manager.index(&mut owner.table, place, &computed(&hashes)));
    let blocks = owner.table.blocks().to_vec();
    pool.manager.free(&mut owner.table);
    assert_eq!((pool.manager.cached_blocks(), pool.manager.free_blocks(), pool.manager.used_blocks()), (2, 6, 0));

    let mut again = BlockTable::default();
    assert_eq!(pool.manager.reuse(&mut again, 0, &hashes), 2);
    assert_eq!(again.blocks(), &blocks[..2]);
    assert_eq!((pool.manager.cached_blocks(), pool.manager.filled_slots()), (0, 2 * SIZE));
    assert_eq!(pool.manager.reuse(&mut BlockTable::default(), 0, &[root.next(&[7])]), 0);
    pool.manager.check([&again].into_iter(), &[]);
}

#[test]
fn cached_blocks_are_evicted_from_the_end_of_the_prefix() {
    let mut pool = Pool::new(4, true);
    let hashes = three_hashes();
    let mut owner = pool.owner(3 * SIZE);
    (0..hashes.len()).for_each(|place| pool.manager.index(&mut owner.table, place, &computed(&hashes)));
    pool.manager.free(&mut owner.table);
    let other = pool.owner(2 * SIZE);
    assert_eq!((pool.manager.cached_blocks(), pool.manager.free_blocks()), (2, 0));
    let mut again = BlockTable::default();
    assert_eq!(pool.manager.reuse(&mut again, 0, &hashes), 2, "the last block of the prefix was evicted first");
    pool.manager.check([&again, &other.table].into_iter(), &[]);
}

fn three_hashes() -> Vec<BlockHash> {
    let next = |hash: &BlockHash| Some(hash.next(&[1]));
    std::iter::successors(next(&BlockHash::root(&[0; 32], b"")), next).take(3).collect()
}

#[test]
fn blocks_out_of_the_window_are_evicted_first_and_the_others_suffice() {
    let mut pool = Pool::windowed(3, true, &[Some(SIZE)]);
    let hashes = three_hashes();
    let mut owner = pool.owner(3 * SIZE);
    (0..hashes.len()).for_each(|place| pool.manager.index(&mut owner.table, place, &computed(&hashes)));
    pool.manager.drop_out_of_window(&mut owner.table, 3 * SIZE);
    assert_eq!((pool.manager.cached_blocks(), pool.manager.dropped_blocks()), (2, 2));
    pool.manager.free(&mut owner.table);
    assert_eq!((pool.manager.cached_blocks(), pool.manager.dropped_blocks()), (3, 0));
    let other = pool.owner(2 * SIZE);
    let mut again = BlockTable::default();
    assert_eq!(pool.manager.reuse(&mut again, 0, &hashes), 3, "the last block gives the whole prefix");
    assert_eq!(again.blocks(), [NULL_BLOCK, NULL_BLOCK, 2], "the first two blocks were evicted, the last one was not");
    pool.manager.check([&again, &other.table].into_iter(), &[]);
}

#[test]
fn layer_groups_have_separate_blocks_of_one_pool() {
    let mut pool = Pool::windowed(12, false, &[None, Some(SIZE)]);
    let mut owner = pool.owner(3 * SIZE);
    assert_eq!((owner.table.places(), owner.table.blocks().len(), pool.manager.used_blocks()), (3, 6, 6));
    pool.manager.drop_out_of_window(&mut owner.table, 3 * SIZE);
    assert_eq!((pool.manager.used_blocks(), pool.manager.dropped_blocks(), owner.table.has_dropped()), (4, 2, true));
    let slots: Vec<u32> = pool.manager.slots(&owner.table, 2 * SIZE + 1).collect();
    assert_eq!(slots, [4 * SIZE as u32 + 1, 5 * SIZE as u32 + 1]);
    // The window of a shorter sequence would need null entries.
    let looks_back = |len| pool.manager.sees_null_block(&owner.table, len);
    assert_eq!([3 * SIZE, 3 * SIZE - 1].map(looks_back), [false, true]);
    let mut fork = pool.fork(&owner, 3 * SIZE);
    assert_eq!(pool.manager.dropped_blocks(), 4);
    pool.write(&mut fork, 1).unwrap();
    assert_eq!(pool.manager.used_blocks(), 6, "a new block for each group");
    assert_eq!(
        pool.manager.needed(&owner.table, 3 * SIZE..20 * SIZE, 1),
        17 + 2,
        "at most the blocks of the window, of which the fork has those that exist"
    );
    pool.check(&[&owner, &fork]);
    pool.manager.free(&mut owner.table);
    pool.manager.free(&mut fork.table);
    assert_eq!((pool.manager.used_blocks(), pool.manager.dropped_blocks()), (0, 0));
}

/// A sequence can continue after a prefix only if every group has the visible blocks.
#[test]
fn a_prefix_match_needs_the_visible_blocks_of_all_layer_groups() {
    let mut pool = Pool::windowed(16, true, &[None, Some(SIZE)]);
    let hashes = three_hashes();
    let mut owner = pool.owner(3 * SIZE);
    (0..3).for_each(|place| pool.manager.index(&mut owner.table, place, &computed(&hashes)));
    pool.manager.drop_out_of_window(&mut owner.table, 3 * SIZE);
    pool.manager.free(&mut owner.table);
    let found = |pool: &mut Pool, hashes: &[BlockHash]| {
        let mut table = BlockTable::default();
        let places = pool.manager.reuse(&mut table, 0, hashes);
        pool.check(&[&Owner { table: BlockTable { blocks: table.blocks.clone(), places, ..BlockTable::default() }, len: 0 }]);
        pool.manager.free(&mut table);
        places
    };
    assert_eq!([3, 2, 1].map(|end| found(&mut pool, &hashes[..end])), [3, 2, 1]);
    // Without the windowed block of the second place, no prefix can end there. Longer prefixes do
    // not need the block.
    let second = pool.manager.find(1, &hashes[1]).unwrap();
    pool.manager.remove_cached(second);
    assert_eq!([3, 2, 1].map(|end| found(&mut pool, &hashes[..end])), [3, 1, 1]);
    // Without a block of the group that attends to all positions, no longer prefix is found.
    let second = pool.manager.find(0, &hashes[1]).unwrap();
    pool.manager.remove_cached(second);
    assert_eq!([3, 2, 1].map(|end| found(&mut pool, &hashes[..end])), [1, 1, 1]);
}

#[test]
fn equal_computed_blocks_are_deduplicated() {
    let mut pool = Pool::new(8, true);
    let hash = BlockHash::root(&[0; 32], b"").next(&[1]);
    let (mut a, mut b) = (pool.owner(SIZE), pool.owner(SIZE));
    pool.manager.index(&mut a.table, 0, &computed(&[hash]));
    pool.manager.index(&mut b.table, 0, &computed(&[hash]));
    assert_eq!(a.table.blocks(), b.table.blocks());
    assert_eq!((pool.manager.used_blocks(), pool.manager.filled_slots()), (1, SIZE));
    pool.check(&[&a, &b]);
}

#[test]
fn a_cached_block_leaves_the_prefix_cache_before_it_is_written() {
    let mut pool = Pool::new(8, true);
    let hash = BlockHash::root(&[0; 32], b"").next(&[1]);
    let mut owner = pool.owner(SIZE);
    pool.manager.index(&mut owner.table, 0, &computed(&[hash]));
    owner.len = 2;
    pool.manager.truncate(&mut owner.table, 2);
    assert_eq!(pool.write(&mut owner, 1).unwrap(), []);
    assert_eq!(pool.manager.reuse(&mut BlockTable::default(), 0, &[hash]), 0);
    pool.check(&[&owner]);
}

/// A failed step may have written to blocks. Blocks that return to their tables must be intact.
#[test]
fn blocks_that_a_rollback_restores_are_not_overwritten() {
    let mut pool = Pool::new(8, false);
    let mut a = pool.owner(7);
    let mut b = pool.fork(&a, 5);
    let Pool { manager, copies } = &mut pool;
    manager.prepare(&mut a.table, 7..8, copies).unwrap();
    manager.prepare(&mut b.table, 5..6, copies).unwrap();
    assert_eq!(copies.len(), 2, "the second owner would overwrite the sixth token of the first one");
    while let Some(copy) = copies.pop() {
        let undone = [&mut a, &mut b].into_iter().filter_map(|owner| manager.undo(copy, &mut owner.table).then_some(())).count();
        assert_eq!(undone, 1);
    }
    assert_eq!((pool.refs(&a), pool.manager.used_blocks()), (vec![2, 2], 2));
    pool.check(&[&a, &b]);
}

#[test]
fn a_table_that_ends_within_a_block_continues_with_a_cached_block() {
    let mut pool = Pool::new(8, true);
    let hashes = three_hashes();
    let mut owner = pool.owner(3 * SIZE);
    (0..hashes.len()).for_each(|place| pool.manager.index(&mut owner.table, place, &computed(&hashes)));
    let mut other = pool.owner(SIZE + 2);
    assert_eq!(pool.manager.reuse(&mut other.table, 2, &hashes[..2]), 0, "the table has only these blocks");
    assert_eq!(pool.manager.reuse(&mut other.table, 1, &hashes), 2);
    assert_eq!(other.table.blocks()[1..], owner.table.blocks()[1..]);
    assert_eq!((pool.manager.used_blocks(), pool.manager.filled_slots()), (4, 4 * SIZE));
    // A block is also found after its own table has released it.
    pool.manager.free(&mut owner.table);
    assert_eq!(pool.manager.reuse(&mut other.table, 1, &hashes), 2);
    pool.check(&[&other]);
}

#[test]
fn shared_blocks_are_swapped_once_and_shared_again_after_swap_in() {
    let mut pool = Pool::new(8, false);
    let mut owners = vec![pool.owner(7)];
    (0..3).for_each(|_| owners.push(pool.fork(&owners[0], 7)));
    assert_eq!(pool.manager.swap_out_load(owners.iter().map(|owner| &owner.table)), SwapLoad { blocks: 2, tokens: 7 });
    let moved: Vec<usize> = owners.iter_mut().map(|owner| pool.swap_out(owner)).collect();
    assert_eq!(moved, [2, 0, 0, 0]);
    assert_eq!((pool.manager.used_blocks(), pool.manager.host_used(), pool.manager.swapped()), (0, 2, 4));
    pool.check(&owners.iter().collect::<Vec<_>>());

    assert_eq!(pool.manager.blocks_to_swap_in(owners.iter().map(|owner| &owner.table)), 2);
    let moved: Vec<usize> = owners.iter_mut().map(|owner| pool.swap_in(owner)).collect();
    assert_eq!(moved, [2, 0, 0, 0]);
    assert_eq!((pool.refs(&owners[0]), pool.manager.used_blocks(), pool.manager.filled_slots()), (vec![4, 4], 2, 7));
    assert_eq!((pool.manager.host_used(), pool.manager.swapped()), (0, 0));
    pool.check(&owners.iter().collect::<Vec<_>>());
}

#[test]
fn blocks_still_on_the_device_are_not_swapped_in() {
    let mut pool = Pool::new(8, false);
    let on_device = pool.owner(7);
    let mut swapped = pool.fork(&on_device, 7);
    assert_eq!(pool.swap_out(&mut swapped), 2);
    assert_eq!(pool.manager.blocks_to_swap_in(std::iter::once(&swapped.table)), 0);
    assert_eq!((pool.swap_in(&mut swapped), pool.refs(&on_device)), (0, vec![2, 2]));
    pool.check(&[&on_device, &swapped]);
}

#[test]
fn a_write_on_the_device_does_not_change_the_mirrored_host_block() {
    let mut pool = Pool::new(8, false);
    let mut on_device = pool.owner(7);
    let (mut swapped, mut child) = (pool.fork(&on_device, 7), pool.fork(&on_device, 6));
    assert_eq!([&mut swapped, &mut child].map(|owner| pool.swap_out(owner)), [2, 0]);
    // The only table on the device writes in place.
    assert_eq!(pool.write(&mut on_device, 1).unwrap(), []);
    pool.check(&[&on_device, &swapped, &child]);
    assert_eq!(pool.swap_in(&mut swapped), 1, "the first block is unchanged on the device");
    assert_eq!(pool.refs(&on_device), [2, 1]);
    // The second table to return shares with the first until one of them writes.
    assert_eq!((pool.swap_in(&mut child), pool.refs(&swapped)), (0, vec![3, 2]));
    assert_eq!(pool.write(&mut child, 1).unwrap().len(), 1);
    pool.check(&[&on_device, &swapped, &child]);
}

#[test]
fn a_swapped_table_is_forked_and_truncated_in_the_host_tier() {
    let mut pool = Pool::new(8, false);
    let mut owner = pool.owner(3 * SIZE);
    pool.swap_out(&mut owner);
    let mut child = pool.fork(&owner, SIZE + 1);
    assert_eq!((pool.manager.host_used(), pool.manager.swapped(), pool.manager.used_blocks()), (3, 2, 0));
    pool.manager.truncate(&mut owner.table, SIZE);
    assert_eq!(pool.manager.host_used(), 2);
    pool.check(&[&owner, &child]);
    assert_eq!(pool.swap_in(&mut child), 2);
    assert_eq!(pool.swap_in(&mut owner), 0);
    pool.manager.free(&mut owner.table);
    pool.check(&[&child]);
}

#[test]
fn a_swap_in_that_is_swapped_out_at_once_keeps_its_contents() {
    let mut pool = Pool::new(8, false);
    let mut owner = pool.owner(7);
    pool.swap_out(&mut owner);
    pool.manager.swap_in(&mut owner.table).unwrap();
    assert!(pool.manager.continue_swap_in(&mut owner.table));
    // The sequence had a planned write when it was swapped out.
    pool.manager.prepare(&mut owner.table, 7..8, &mut pool.copies).unwrap();
    assert_eq!(pool.manager.swap_out_load(std::iter::once(&owner.table)).blocks, 0);
    pool.manager.swap_out(&mut owner.table).unwrap();
    assert!(pool.manager.moves().is_empty(), "{:?}", pool.manager.moves());
    assert_eq!((pool.manager.host_used(), pool.manager.used_blocks()), (2, 0));
    pool.check(&[&owner]);
}

/// Begins a step, and makes the transfers of the previous one.
fn begin_step(pool: &mut Pool) {
    pool.manager.clear_moves();
    pool.manager.begin_step();
}

#[test]
fn a_step_moves_a_limited_number_of_blocks_and_keeps_the_others() {
    let mut pool = Pool::new(8, false);
    pool.manager.limit_moves(2);
    let mut owner = pool.owner(5 * SIZE);
    pool.manager.swap_out(&mut owner.table).unwrap();
    let mut left = vec![(pool.manager.moves().out.len(), pool.manager.used_blocks())];
    while pool.manager.has_queued_out() {
        pool.check(&[&owner]);
        begin_step(&mut pool);
        pool.manager.schedule_moves_out();
        left.push((pool.manager.moves().out.len(), pool.manager.used_blocks()));
    }
    assert_eq!(left, [(2, 3), (2, 1), (1, 0)], "the transfers of each step, and the used blocks after it");
    begin_step(&mut pool);
    pool.manager.swap_in(&mut owner.table).unwrap();
    let mut moved = Vec::new();
    loop {
        let has_arrived = pool.manager.continue_swap_in(&mut owner.table);
        moved.push(pool.manager.moves().back.len());
        assert_eq!((owner.table.is_on_device(), pool.manager.used_blocks()), (has_arrived, 5));
        begin_step(&mut pool);
        pool.check(&[&owner]);
        if has_arrived {
            break;
        }
    }
    assert_eq!((moved, pool.manager.host_used()), (vec![2, 2, 1], 0));
}

#[test]
fn a_table_that_returns_before_its_blocks_were_copied_uses_them_again() {
    let mut pool = Pool::new(8, false);
    pool.manager.limit_moves(2);
    let mut owner = pool.owner(5 * SIZE);
    pool.manager.swap_out(&mut owner.table).unwrap();
    begin_step(&mut pool);
    pool.manager.swap_in(&mut owner.table).unwrap();
    assert!(pool.manager.continue_swap_in(&mut owner.table) && !pool.manager.has_queued_out());
    assert_eq!(pool.manager.moves().back.len(), 2, "three blocks have not left the device");
    begin_step(&mut pool);
    assert_eq!((pool.refs(&owner), pool.manager.host_used()), (vec![1; 5], 0));
    pool.check(&[&owner]);
}

#[test]
fn queued_transfers_of_a_freed_table_are_cancelled() {
    let mut pool = Pool::new(8, true);
    pool.manager.limit_moves(1);
    let (mut leaving, mut arriving) = (pool.owner(3 * SIZE), pool.owner(2 * SIZE));
    pool.swap_out(&mut arriving);
    while pool.manager.has_queued_out() {
        begin_step(&mut pool);
        pool.manager.schedule_moves_out();
    }
    begin_step(&mut pool);
    pool.manager.swap_out(&mut leaving.table).unwrap();
    pool.manager.swap_in(&mut arriving.table).unwrap();
    assert!(!pool.manager.continue_swap_in(&mut arriving.table));
    let mut fork = pool.fork(&arriving, 2 * SIZE);
    pool.check(&[&leaving, &arriving, &fork]);
    pool.manager.free(&mut leaving.table);
    pool.manager.free(&mut arriving.table);
    assert!(!fork.table.is_on_device(), "a fork of an arriving table arrives too");
    pool.check(&[&leaving, &arriving, &fork]);
    pool.manager.free(&mut fork.table);
    pool.check(&[&leaving, &arriving, &fork]);
    assert_eq!((pool.manager.used_blocks(), pool.manager.host_used(), pool.manager.tables_off_device()), (0, 0, 0));
    assert!(pool.manager.moves().is_empty() && !pool.manager.has_queued_out());
}

#[test]
fn a_block_that_waits_for_its_copy_is_not_overwritten() {
    let mut pool = Pool::new(8, false);
    pool.manager.limit_moves(1);
    let mut owner = pool.owner(SIZE + 1);
    let mut fork = pool.fork(&owner, SIZE + 1);
    pool.manager.swap_out(&mut fork.table).unwrap();
    assert!(pool.manager.has_queued_out());
    let copies = pool.write(&mut owner, 1).unwrap();
    assert_eq!(copies.len(), 1, "the host tier needs the old contents");
    begin_step(&mut pool);
    pool.manager.schedule_moves_out();
    begin_step(&mut pool);
    assert!(pool.write(&mut owner, 1).unwrap().is_empty());
    pool.check(&[&owner, &fork]);
}
