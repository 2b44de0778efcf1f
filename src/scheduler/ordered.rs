//! An ordered set that does not allocate within its capacity: a treap in a slab, whose nodes are
//! also linked in order.

use crate::error::Result;

/// A set of keys in ascending order.
#[derive(Debug, Clone)]
pub struct OrderedSet<K> {
    nodes: Vec<Node<K>>,
    root: u32,
    first: u32,
    /// The first unused node. Unused nodes are linked by `after`.
    free: u32,
    len: usize,
    random: u32,
}

/// A node of the treap and of the linked list.
#[derive(Debug, Clone, Copy)]
struct Node<K> {
    key: K,
    /// Random priority of the treap, larger than those of the nodes below. It keeps the tree
    /// balanced for any order of insertion.
    weight: u32,
    left: u32,
    right: u32,
    before: u32,
    after: u32,
}

/// The index of a missing node.
const NONE: u32 = u32::MAX;

impl<K> Default for OrderedSet<K> {
    fn default() -> OrderedSet<K> {
        OrderedSet { nodes: Vec::new(), root: NONE, first: NONE, free: NONE, len: 0, random: 0x9E37_79B9 }
    }
}

impl<K: Copy + Ord> OrderedSet<K> {
    /// Reserves space for `len` keys in total.
    pub fn try_reserve(&mut self, len: usize) -> Result<()> {
        Ok(self.nodes.try_reserve(len.saturating_sub(self.nodes.len()))?)
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn first(&self) -> Option<K> {
        self.key(self.first)
    }

    /// Iterates over the keys in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = K> {
        let node = |place: u32| self.nodes.get(place as usize);
        std::iter::successors(node(self.first), move |before| node(before.after)).map(|node| node.key)
    }

    pub fn contains(&self, key: K) -> bool {
        self.find(key).0 != NONE
    }

    /// Inserts a key. Returns false if the set already contains it.
    pub fn insert(&mut self, key: K) -> bool {
        let (found, before) = self.find(key);
        if found != NONE {
            return false;
        }
        let node = self.new_node(key);
        self.link(before, node);
        let (left, right) = self.split(self.root, key);
        let left = self.merge(left, node);
        self.root = self.merge(left, right);
        self.len += 1;
        true
    }

    /// Removes a key. Returns false if the set does not contain it.
    pub fn remove(&mut self, key: K) -> bool {
        let (node, _) = self.find(key);
        if node == NONE {
            return false;
        }
        self.root = self.without(self.root, key);
        let Node { before, after, .. } = self.nodes[node as usize];
        self.join(before, after);
        self.nodes[node as usize].after = std::mem::replace(&mut self.free, node);
        self.len -= 1;
        true
    }

    pub fn pop_first(&mut self) -> Option<K> {
        let first = self.first()?;
        self.remove(first);
        Some(first)
    }

    /// Calls `keep` for each key in order, and removes the keys for which it returns false.
    pub fn retain(&mut self, mut keep: impl FnMut(K) -> bool) {
        let mut next = self.first;
        while let Some(key) = self.key(next) {
            next = self.nodes[next as usize].after;
            if !keep(key) {
                self.remove(key);
            }
        }
    }

    fn key(&self, node: u32) -> Option<K> {
        self.nodes.get(node as usize).map(|node| node.key)
    }

    /// Returns the node of the key, and the node that precedes the key.
    fn find(&self, key: K) -> (u32, u32) {
        let (mut next, mut before) = (self.root, NONE);
        while next != NONE {
            let node = &self.nodes[next as usize];
            if node.key == key {
                return (next, node.before);
            }
            (next, before) = if node.key < key { (node.right, next) } else { (node.left, before) };
        }
        (NONE, before)
    }

    fn new_node(&mut self, key: K) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        let node = Node { key, weight: self.random, left: NONE, right: NONE, before: NONE, after: NONE };
        let place = self.free;
        if place == NONE {
            self.nodes.push(node);
            return self.nodes.len() as u32 - 1;
        }
        self.free = std::mem::replace(&mut self.nodes[place as usize], node).after;
        place
    }

    /// Links the node after `before`.
    fn link(&mut self, before: u32, node: u32) {
        let after = if before == NONE { self.first } else { self.nodes[before as usize].after };
        self.join(before, node);
        self.join(node, after);
    }

    /// Makes two nodes adjacent in the linked list.
    fn join(&mut self, before: u32, after: u32) {
        match before {
            NONE => self.first = after,
            before => self.nodes[before as usize].after = after,
        }
        if after != NONE {
            self.nodes[after as usize].before = before;
        }
    }

    /// Splits the tree into the keys before `key` and the others.
    fn split(&mut self, tree: u32, key: K) -> (u32, u32) {
        let Some(&node) = self.nodes.get(tree as usize) else { return (NONE, NONE) };
        if node.key < key {
            let (left, right) = self.split(node.right, key);
            self.nodes[tree as usize].right = left;
            (tree, right)
        } else {
            let (left, right) = self.split(node.left, key);
            self.nodes[tree as usize].left = right;
            (left, tree)
        }
    }

    /// Merges two trees. All keys of `left` precede those of `right`.
    fn merge(&mut self, left: u32, right: u32) -> u32 {
        let (Some(&one), Some(&other)) = (self.nodes.get(left as usize), self.nodes.get(right as usize)) else {
            return if left == NONE { right } else { left };
        };
        if one.weight > other.weight {
            self.nodes[left as usize].right = self.merge(one.right, right);
            left
        } else {
            self.nodes[right as usize].left = self.merge(left, other.left);
            right
        }
    }

    /// Returns the tree without the key, which it must contain.
    fn without(&mut self, tree: u32, key: K) -> u32 {
        let Node { key: here, left, right, .. } = self.nodes[tree as usize];
        match key.cmp(&here) {
            std::cmp::Ordering::Equal => return self.merge(left, right),
            std::cmp::Ordering::Less => self.nodes[tree as usize].left = self.without(left, key),
            std::cmp::Ordering::Greater => self.nodes[tree as usize].right = self.without(right, key),
        }
        tree
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::tests::Random;
    use super::*;

    impl<K: Copy + Ord + std::fmt::Debug> OrderedSet<K> {
        /// Panics unless the tree is ordered and balanced by weight. Returns its depth.
        fn check(&self, tree: u32, min: Option<K>, max: Option<K>) -> usize {
            if tree == NONE {
                return 0;
            }
            let node = &self.nodes[tree as usize];
            assert!(min.is_none_or(|min| min < node.key) && max.is_none_or(|max| node.key < max), "the keys of the tree are in order");
            for child in [node.left, node.right].into_iter().filter(|&child| child != NONE) {
                assert!(self.nodes[child as usize].weight <= node.weight, "a parent has at least the weight of its children");
            }
            1 + self.check(node.left, min, Some(node.key)).max(self.check(node.right, Some(node.key), max))
        }
    }

    #[test]
    fn random_operations_give_the_results_of_a_btree_set() {
        for seed in 1..40u64 {
            let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
            let (mut set, mut oracle) = (OrderedSet::default(), BTreeSet::new());
            let range = 1 + random.below(500);
            for _ in 0..3000 {
                let key = random.below(range);
                match random.below(16) {
                    0..8 => assert_eq!(set.insert(key), oracle.insert(key)),
                    8..14 => assert_eq!(set.remove(key), oracle.remove(&key)),
                    14 => assert_eq!(set.pop_first(), oracle.pop_first()),
                    _ if random.below(20) == 0 => {
                        let mut visited = Vec::new();
                        set.retain(|key| {
                            visited.push(key);
                            !key.is_multiple_of(3)
                        });
                        assert!(visited.iter().eq(&oracle), "retain visits all keys in order");
                        oracle.retain(|key| !key.is_multiple_of(3));
                    }
                    _ => assert_eq!(set.contains(key), oracle.contains(&key)),
                }
                assert_eq!((set.len(), set.first()), (oracle.len(), oracle.first().copied()));
            }
            assert!(set.iter().eq(oracle.iter().copied()));
            set.check(set.root, None, None);
            let links = |node: &u32| Some(set.nodes[*node as usize].after).filter(|&after| after != NONE);
            for node in std::iter::successors(Some(set.first).filter(|&first| first != NONE), links) {
                let before = set.nodes[node as usize].before;
                assert!(if before == NONE { set.first == node } else { set.nodes[before as usize].after == node });
            }
        }
    }

    #[test]
    fn ordered_keys_keep_the_tree_flat_and_reserved_memory_suffices() {
        let mut set = OrderedSet::default();
        set.try_reserve(100_000).unwrap();
        let capacity = set.nodes.capacity();
        for round in 0..3 {
            (0..100_000).for_each(|key| assert!(set.insert(key + round)));
            assert!(set.check(set.root, None, None) < 60);
            (0..50_000).for_each(|key| assert!(set.remove(key * 2 + round)));
            while set.pop_first().is_some() {}
        }
        assert_eq!((set.nodes.capacity(), set.len()), (capacity, 0));
    }
}
