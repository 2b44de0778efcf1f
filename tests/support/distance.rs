//! The distance of results from those of another backend.

/// Returns ||found - expected|| / ||expected||. It is infinite if a number is NaN or infinite in one of
/// them only.
pub fn relative_distance(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let norm = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|x| x * x).sum::<f64>().sqrt();
    let same = |found: f32, expected: f32| found == expected || found.is_nan() && expected.is_nan();
    let pairs = found.iter().zip(expected).filter(|&(&found, &expected)| !same(found, expected));
    let distance = norm(&mut pairs.map(|(&found, &expected)| f64::from(found) - f64::from(expected)));
    let size = norm(&mut expected.iter().filter(|x| x.is_finite()).map(|&x| f64::from(x)));
    match distance {
        0.0 => 0.0,
        _ if distance.is_nan() => f64::INFINITY,
        _ => distance / size,
    }
}
