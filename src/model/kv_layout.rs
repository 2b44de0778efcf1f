//! The division of layers into groups that share block tables, and the position of each layer's K
//! and V in a block.

use std::ops::Range;

use super::spec::{Layer, ModelSpec};

/// Layers with the same window are divided into groups of equal size, with one block table per
/// group. A block stores one layer of its group per level, so blocks of all groups have the same
/// size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvLayout {
    /// `[groups]` window in positions. None: full attention.
    pub windows: Vec<Option<usize>>,
    pub levels: usize,
    places: Vec<LayerPlace>, // [layers]
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerPlace {
    pub group: usize,
    pub level: usize,
}

/// Maximum number of groups; each has an entry in every block table per block of tokens.
const MAX_GROUPS: usize = 16;
/// If layers do not form equal groups, a part of each block is unused. 1/LITTLE of the layers is an
/// acceptable part, 1/TOO_MUCH the maximum.
const LITTLE: usize = 16;
const TOO_MUCH: usize = 4;

impl KvLayout {
    pub fn for_spec(spec: &ModelSpec) -> KvLayout {
        let windows: Vec<Option<usize>> = spec.layers.iter().map(|layer| layer.attention.shape().window).collect();
        let kv = |layer: &Layer| {
            let shape = layer.attention.shape();
            (shape.kv_heads, shape.head_dim, shape.values)
        };
        let alike = spec.layers.windows(2).all(|pair| kv(&pair[0]) == kv(&pair[1]));
        KvLayout::group(&windows, alike)
    }

    /// Computes the layout. `alike`: all layers have the same KV shape, so that any two may share a
    /// level.
    fn group(layers: &[Option<usize>], alike: bool) -> KvLayout {
        let mut kinds: Vec<Option<usize>> = Vec::new();
        for window in layers {
            if !kinds.contains(window) {
                kinds.push(*window);
            }
        }
        // Layers with the largest window have the most blocks. Their groups have no padding.
        kinds.sort_by_key(|window| std::cmp::Reverse(window.unwrap_or(usize::MAX)));
        if kinds.len() < 2 || !alike {
            return KvLayout::together(layers.len(), kinds.first().copied().flatten());
        }
        let counts: Vec<usize> = kinds.iter().map(|kind| layers.iter().filter(|window| *window == kind).count()).collect();
        let groups_of = |levels: usize| counts.iter().map(|count| count.div_ceil(levels)).sum::<usize>();
        let divides = |levels: &usize| counts[0].is_multiple_of(*levels) && groups_of(*levels) <= MAX_GROUPS;
        let padding = |levels: usize| groups_of(levels) * levels - layers.len();
        let candidates = || (1..=counts[0]).rev().filter(divides);
        // The fewest groups with little padding, or else the groups with the least padding.
        let little = candidates().find(|&levels| padding(levels) <= layers.len() / LITTLE);
        let min_padding = candidates().min_by_key(|&levels| padding(levels)).filter(|&levels| padding(levels) <= layers.len() / TOO_MUCH);
        let Some(levels) = little.or(min_padding) else { return KvLayout::together(layers.len(), kinds[0]) };
        let groups: Vec<usize> = counts.iter().map(|count| count.div_ceil(levels)).collect();
        let mut seen = vec![0; kinds.len()];
        let place = |window: &Option<usize>| {
            let kind = kinds.iter().position(|kind| kind == window).unwrap_or(0);
            let first: usize = groups[..kind].iter().sum();
            let place = LayerPlace { group: first + seen[kind] / levels, level: seen[kind] % levels };
            seen[kind] += 1;
            place
        };
        let places = layers.iter().map(place).collect();
        let windows = kinds.iter().zip(&groups).flat_map(|(kind, &groups)| std::iter::repeat_n(*kind, groups)).collect();
        KvLayout { windows, levels, places }
    }

    /// Returns a layout with one group: each layer has its own level.
    fn together(layers: usize, window: Option<usize>) -> KvLayout {
        KvLayout { windows: vec![window], levels: layers, places: (0..layers).map(|level| LayerPlace { group: 0, level }).collect() }
    }

    /// Returns the layout of the stage with these layers. It has the same groups, since all stages
    /// use the same block tables, and only the levels of its layers.
    pub fn for_stage(&self, layers: Range<usize>) -> KvLayout {
        let places = &self.places[layers];
        let mut levels: Vec<usize> = places.iter().map(|place| place.level).collect();
        levels.sort_unstable();
        levels.dedup();
        let local = |place: &LayerPlace| LayerPlace { level: levels.partition_point(|level| *level < place.level), ..*place };
        KvLayout { windows: self.windows.clone(), levels: levels.len(), places: places.iter().map(local).collect() }
    }

    pub fn places(&self) -> &[LayerPlace] {
        &self.places
    }

    /// Returns one layer of each level.
    pub fn of_levels<'a, L>(&'a self, layers: &'a [L]) -> impl Iterator<Item = &'a L> {
        let on = |level| self.places.iter().position(|place| place.level == level).map(|layer| &layers[layer]);
        (0..self.levels).filter_map(on)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the numbers of groups and levels of a model in which every `every`th layer has full
    /// attention.
    fn alternating(layers: usize, every: usize) -> (usize, usize) {
        let windows: Vec<_> = (1..=layers).map(|layer| (layer % every > 0).then_some(512)).collect();
        let layout = KvLayout::group(&windows, true);
        let mut places = layout.places.clone();
        places.sort_by_key(|place| (place.group, place.level));
        places.dedup();
        assert_eq!(places.len(), layers, "each layer has its own place");
        assert!(layout.windows.len() <= MAX_GROUPS && layout.windows.len() * layout.levels <= layers + layers / LITTLE);
        for (window, place) in windows.iter().zip(&layout.places) {
            assert_eq!(*window, layout.windows[place.group], "a group has one window");
        }
        (layout.windows.len(), layout.levels)
    }

    #[test]
    fn layers_of_one_kind_form_groups_of_equal_size() {
        assert_eq!(alternating(24, 2), (2, 12), "gpt-oss");
        assert_eq!(alternating(42, 2), (2, 21), "Gemma 2, 9B");
        assert_eq!(alternating(48, 6), (6, 8), "Gemma 3, 12B");
        assert_eq!(alternating(34, 6), (7, 5), "Gemma 3, 4B: one of 35 places is empty");
        assert_eq!(alternating(62, 6), (13, 5), "Gemma 3, 27B: three of 65");
        assert_eq!(alternating(26, 6), (13, 2), "Gemma 3, 1B");
        assert_eq!(alternating(32, 4), (4, 8), "Cohere 2");
    }

    #[test]
    fn layers_that_exceed_the_maximum_of_groups_form_fewer_or_one() {
        let one_of = |layers: usize, window: Option<usize>, others: Option<usize>| {
            let mut windows = vec![others; layers];
            windows[layers - 1] = window;
            let layout = KvLayout::group(&windows, true);
            (layout.windows.len(), layout.levels)
        };
        // Qwen2, if its last layer has a window.
        assert_eq!(one_of(28, Some(4096), None), (10, 3));
        assert_eq!(one_of(61, None, Some(4096)), (1, 61), "one layer without a window would need 60 more tables");
        assert_eq!(one_of(12, None, Some(4096)), (12, 1));
    }

    #[test]
    fn equal_layers_form_one_group() {
        let one = |window, layers| KvLayout::group(&vec![window; layers], true);
        assert_eq!((one(None, 5).windows, one(None, 5).levels), (vec![None], 5));
        assert_eq!((one(Some(7), 5).windows, one(Some(7), 5).levels), (vec![Some(7)], 5));
    }

    #[test]
    fn a_stage_has_the_groups_of_the_model_and_the_levels_of_its_layers() {
        let windows: Vec<_> = (0..26).map(|layer| (layer % 2 == 0).then_some(512)).collect();
        let whole = KvLayout::group(&windows, true);
        assert_eq!((whole.windows.len(), whole.levels), (2, 13));
        for layers in [0..9, 9..18, 18..26, 0..26] {
            let stage = whole.for_stage(layers.clone());
            assert_eq!(stage.windows, whole.windows);
            assert_eq!(stage.levels, layers.len().div_ceil(2));
            let mut used: Vec<usize> = stage.places.iter().map(|place| place.level).collect();
            used.sort_unstable();
            used.dedup();
            assert!(used.into_iter().eq(0..stage.levels));
            let (first, others) = (layers.start, stage.places.iter().zip(&whole.places[layers]));
            for (place, of_whole) in others {
                assert_eq!((place.group, place.level), (of_whole.group, of_whole.level - whole.places[first].level));
            }
        }
        assert_eq!(whole.for_stage(0..26), whole);
    }

    #[test]
    fn layers_with_different_kv_shapes_form_one_group_with_the_largest_window() {
        assert_eq!(KvLayout::group(&[Some(4), None, Some(9)], false).windows, [None]);
        assert_eq!(KvLayout::group(&[Some(4), Some(9)], false).windows, [Some(9)]);
    }
}
