//! `Debug` for types whose text is hashed.

/// Implements `Debug` like `derive`, except that the last field appears only if it is present.
/// Fingerprints and packed weights hash the text of a spec. A field that only shards have must not
/// change the text of a whole model.
macro_rules! debug_without_none {
    ($name:ident $(<$($generic:ident),+>)? { $($field:ident),+; $optional:ident }) => {
        impl $(<$($generic: std::fmt::Debug),+>)? std::fmt::Debug for $name $(<$($generic),+>)? {
            fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                let $name { $($field,)+ $optional } = self;
                let mut fields = f.debug_struct(stringify!($name));
                $(fields.field(stringify!($field), $field);)+
                if let Some(present) = $optional {
                    fields.field(stringify!($optional), present);
                }
                fields.finish()
            }
        }
    };
}
pub(crate) use debug_without_none;

#[cfg(test)]
mod tests {
    mod derived {
        #[allow(dead_code)]
        #[derive(Debug)]
        pub struct Pair<T> {
            pub first: T,
            pub second: Vec<u8>,
        }
    }

    #[allow(dead_code)]
    struct Pair<T> {
        first: T,
        second: Vec<u8>,
        part: Option<u8>,
    }
    debug_without_none!(Pair<T> { first, second; part });

    #[test]
    fn the_text_without_the_optional_field_is_the_derived_one() {
        let pair = |part| Pair { first: "one", second: vec![2], part };
        let derived = derived::Pair { first: "one", second: vec![2] };
        assert_eq!(format!("{:?}", pair(None)), format!("{derived:?}"));
        assert_eq!(format!("{:#?}", pair(None)), format!("{derived:#?}"));
        assert_eq!(format!("{:?}", pair(Some(3))), "Pair { first: \"one\", second: [2], part: 3 }");
    }
}
